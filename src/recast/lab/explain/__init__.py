"""Pages of `recast explain`: click a pixel and every head shows where it looks, or see the map of each likely class.

`inputs` reads images and class names, `maps` turns a network and an image into maps, `scene` describes a page as plain
data, `make` builds the scene of any network. `open` and `pages` accept networks by name and run folders. `write` turns
a scene into HTML.
"""
