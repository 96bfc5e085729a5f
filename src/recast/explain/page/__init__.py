"""The page of `recast explain`: click a pixel, and every head shows where it looks.

pictures: files and validation images → what a network sees. record_maps: network and image → maps. scene: what a page
shows, as plain data. make, run_pages: a scene of any network, of a run. pack, write: a scene → HTML (no torch).
"""
