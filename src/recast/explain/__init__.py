"""The page of `recast explain`: click a pixel, and every head shows where it looks; or the maps of the classes.

pictures: files and validation images → what a network sees. record_maps, class_layers: network and image → maps. scene:
what a page shows, as plain data. make: a scene of any network; run_pages: of a run; model_pages, open_model,
class_names: of a network by its name. pack, write: a scene → HTML; sheet, weights: → PNG (both without torch).
"""
