"""What the pages of `report`, `explain` and `trial` share: templates, formats and charts."""
