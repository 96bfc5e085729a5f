"""The pictures of the page and of the folder of figures: each is drawn once for the screen and once for paper."""
