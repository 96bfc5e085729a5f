"""Back from attention: what a trained layer no longer needs is removed, multiplied out, or becomes a convolution."""
