"""The operator under the fast backends: heads gather and project one after another, and no map is ever held whole.

    y = b + Σ_h (shift_h · S_h + R_h ⊗ K_h + content_h · softmax(Q_h K_hᵀ / √D)) V W_out^h

The Gaussian is applied as two small products, R over the rows and K over the columns. The content maps of a few
thousand queries at a time stay in the processor's cache. The backward pass computes them again (as flash attention
does, Dao et al. 2022), here with values that all heads share and that are wider than the keys.

Derivatives of the first order only: `dense` has the others.
"""

from recast.layers.functional.streaming.operators import attend

__all__ = ["attend"]
