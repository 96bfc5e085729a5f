"""The fine-tuning of Transformed CNNs (d'Ascoli et al. 2021, arXiv:2106.05795): a trained ResNet-RS becomes a hybrid.

    recast train tcnn --data-dir IMAGENET --out RUN                           (T-ResNet50-RS at 224)
    recast train tcnn --data-dir IMAGENET --model.name resnetrs101 --out RUN

The last stage's 3×3 convolutions become GPSA with the sigmoid gate, α = λ = 1, its stride 2 removed; 50 epochs of
AdamW at 1e-4, batches of 1024, 5 epochs of warm-up, 0.1 for λ. What the paper leaves open is DeiT's: decay 0.05,
warm-up from 1e-6, cosine to 1e-5, label smoothing 0.1. λ's rate follows the same warm-up and cosine, and bf16 is used.

Expected, ImageNet top-1 at 224 (its Tables 1 and 4): ResNet50-RS 79.9 before; 80.1 after 10 epochs, 80.5 after 20,
81.0 after 50; the parent fine-tuned the same way 80.4. ResNet101-RS 81.7 → 82.4; fine-tuned 81.9.
Time: 6 hours on 16 V100 for ResNet50-RS, the paper says. Number reached here: none yet, it needs ImageNet.

Not yet in this `fit`, but in DeiT's and so in the paper's: Mixup 0.8 and CutMix 1.0, random erasing 0.25, repeated
augmentation 3, stochastic depth 0.1, several GPUs. RandAugment, the random resized crop and the flip are in.
"""

from __future__ import annotations

from recast.config import DataConfig, ModelConfig, OptimConfig, RecastConfig, Recipe


def tcnn() -> Recipe:
    """Transformed CNNs, d'Ascoli et al. 2021: ResNet50-RS at 224, sigmoid gate, stride removed, 50 epochs."""
    return Recipe(
        model=ModelConfig("resnetrs50", pretrained=True),
        data=DataConfig("imagenet", img_size=224, augment="imagenet", batch_size=1024, workers=8),
        recast=RecastConfig(gate="sigmoid", alpha=1.0, lambda_init=1.0, stride="remove"),
        optim=OptimConfig(lr=1e-4, gate_lr=0.1, weight_decay=0.05, warmup_epochs=5.0, warmup_lr=1e-6, min_lr=1e-5),
        epochs=50,
        label_smoothing=0.1,
        amp="bf16",
    )
