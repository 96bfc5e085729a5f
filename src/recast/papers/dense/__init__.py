"""Dense prediction: segmentation and detection, what both share, and the embedded scenes."""
