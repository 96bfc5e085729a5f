"""Pages of `recast explain`: click a pixel and every head shows where it looks, or see the map of each likely class.

`inputs` reads images and class names, `maps` turns a network and an image into maps, `scene` describes a page as plain
data, `make` builds the scene of any network. `pages` accepts networks by name and run folders. `write` turns a scene
into HTML. `neighbours` is a page of its own: the nearest training images.
"""
