"""The tables of the page as cells of text, ready to print."""
