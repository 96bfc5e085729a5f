"""The page of `recast explain`: click a pixel, and every head shows where it looks; or the maps of the classes.

inputs: images and names of classes. maps: network and image → maps. scene: what a page shows, as plain data. make: a
scene of any network; open, pages: of a network by its name, of a run. pack, write: a scene → HTML; sheet: → PNG.
"""
