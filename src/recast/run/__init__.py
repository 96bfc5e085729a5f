"""What a run is and what it leaves, as plain data: recipes, records, files. Imports no torch."""
