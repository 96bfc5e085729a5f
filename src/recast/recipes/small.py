"""Small data: CIFAR-10, CIFAR-100, and a folder of images of one's own. Made for a CPU or one GPU."""

from __future__ import annotations

from recast.recipes.entry import change
from recast.run.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, Recipe, RegularizationConfig

__all__ = ["cifar10", "cifar100", "folder"]


def cifar10() -> Recipe:
    """CIFAR-10: a trained ResNet-20 recast (linear gate, last stage), 10 epochs, three arms

    Paper: none for this fine-tuning; the network is He et al. 2015 (arXiv:1512.03385), section 4.2.
    Command: recast train cifar10 --data-dir CIFAR10 --checkpoint WEIGHTS --out runs/cifar10
    Expected: epoch 0 is the parent's own top-1 (91.7 % for the weights of akamaster/pytorch_resnet_cifar10, which need
        --model cifar_resnet20_a: parameter-free shortcuts); what training on gains is not published, and not measured
        here.
    Cost: on 2 CPU cores an epoch of 10,000 images took 1 minute (parent) and 2 to 5 (recast): 3 to 5 hours for the
        whole of CIFAR-10.
    Inferred: everything. The parent has learnt these images by heart, so labels are smoothed, boxes erased and CutMix
        used on half of the batches; 1e-4 is a rate that does not undo the parent.
    """
    return Recipe(
        model=ModelConfig("cifar_resnet20"),
        data=DataConfig("cifar10", batch_size=128),
        augment=AugmentConfig(crop="pad", flip=True, erasing=0.25, cutmix=1.0, mix_prob=0.5),
        optim=OptimConfig(lr=1e-4, weight_decay=0.05, warmup_epochs=1.0),
        regularization=RegularizationConfig(label_smoothing=0.1),
        epochs=10,
    )


def cifar100() -> Recipe:
    """CIFAR-100: a trained ResNet-20 recast (linear gate, last stage), 10 epochs, three arms

    Paper: none for this fine-tuning; the network is He et al. 2015 (arXiv:1512.03385), section 4.2.
    Command: recast train cifar100 --data-dir CIFAR100 --checkpoint WEIGHTS --out runs/cifar100
    Expected: epoch 0 is the parent's own top-1 (68.8 % for the weights of chenyaofo/pytorch-cifar-models); what
        training on gains is not published, and not measured here. Without these augmentations five epochs lost about
        1 point in every arm (docs/runs.md).
    Cost: as cifar10.
    Inferred: everything, as for cifar10.
    """
    return change(cifar10(), data={"name": "cifar100"})


def folder() -> Recipe:
    """your model, your folder of a few thousand images: new head, 20 epochs, three arms

    Paper: none.
    Command: recast train folder --model resnet50 --pretrained --data-dir DIR --out runs/folder
    Expected: no number, it is your data; without a new head (same classes) epoch 0 is the parent's own accuracy.
    Cost: ResNet-18 at 224 takes 0.21 s (parent) and 0.28 s (recast) an image and epoch on one CPU core: 3,000 images
        and 20 epochs are 8 core-hours, half of that with --img-size 160, minutes on a GPU.
    Inferred: everything. Few images: crops of a third of the image at least, RandAugment at magnitude 6 and Mixup 0.1
        instead of ImageNet's stronger ones, which need hundreds of epochs. 20 epochs of 3,000 images are about 900
        updates of 64: 2e-4 moves a new head far enough in these and is still gentle on trained weights; decay 0.05 and
        smoothing 0.1 as usual. Without val/ or test/ a fifth of every class is held out: a tenth would be too few to
        tell arms apart.
    """
    return Recipe(
        model=ModelConfig("resnet18", pretrained=True, new_head=True),
        data=DataConfig("folder", batch_size=64, workers=2, val_fraction=0.2),
        augment=AugmentConfig(
            crop="random", scale=(0.35, 1.0), flip=True, auto_augment="rand-m6-mstd0.5-inc1", mixup=0.1
        ),
        optim=OptimConfig(lr=2e-4, weight_decay=0.05, warmup_epochs=2.0),
        regularization=RegularizationConfig(label_smoothing=0.1),
        epochs=20,
    )
