"""Back from attention: what a trained layer no longer needs is removed, multiplied out, or becomes a convolution.

layers   what one layer becomes
norms    BatchNorm multiplied into the layer before it
model    `fold_`: all layers of a model, with what each step changes
"""
