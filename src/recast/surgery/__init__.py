"""From convolutions to attention and back: which layers, how, when, and the proof."""
