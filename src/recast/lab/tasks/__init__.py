"""Networks for a task: segmentation, detection, embedding."""
