"""Fine-tune a trained classifier with attention beside its convolutions, and without, in a plain loop of torch.

    python examples/train_by_hand.py photos --model resnet50 --pretrained    # photos/train/CLASS/IMAGE, photos/val/…

Both networks start with the same outputs, see the same batches and take as many updates. Prints the top-1 accuracy of
the networks, and if attention is at work; writes the recast network, which `recast.load(FILE)` reads.
"""

from __future__ import annotations

import argparse
import copy

import timm
import torch
from timm.data import create_transform, resolve_data_config
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import recast


def images(folder: str, parent: nn.Module, is_training: bool, batch: int) -> DataLoader:
    """Return the images of a folder with one folder per class, as the network expects them."""
    expected = resolve_data_config({}, model=parent)
    transform = create_transform(**expected, is_training=is_training)
    return DataLoader(ImageFolder(folder, transform), batch, shuffle=is_training, num_workers=2)


def train(model: nn.Module, loader: DataLoader, epochs: int, lr: float, device: str) -> torch.optim.Optimizer:
    """Train in place by AdamW with a cosine schedule."""
    optimizer = torch.optim.AdamW(recast.param_groups(model, lr=lr, weight_decay=0.05))  # gates: 50 times the rate
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    model.train()
    for _ in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return optimizer


@torch.no_grad()
def top1(model: nn.Module, loader: DataLoader, device: str) -> float:
    """Return the percentage of images whose class is right."""
    model.eval()
    right = [(model(x.to(device)).argmax(1).cpu() == y).float() for x, y in loader]
    return 100 * float(torch.cat(right).mean())


def main() -> None:
    """Train both networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
    parser.add_argument("--model", default="resnet18", help="name of a timm network")
    parser.add_argument("--pretrained", action="store_true", help="fetch its weights")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--out", default="child.safetensors")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    classes = ImageFolder(f"{options.data}/train").classes
    built = {"name": options.model, "kwargs": {"num_classes": len(classes)}}
    parent = timm.create_model(options.model, pretrained=options.pretrained, num_classes=len(classes)).to(device).eval()
    training = images(f"{options.data}/train", parent, True, options.batch)
    validation = images(f"{options.data}/val", parent, False, options.batch)

    example = next(iter(validation))[0].to(device)
    plan = recast.plan(parent, example)
    print(plan)
    child = recast.recast_(copy.deepcopy(parent), plan)
    recast.wake_(child, example)  # its maps depend on the image from the start
    result = recast.verify(parent, child, example)
    print(result)
    assert result.ok()

    finetuned = copy.deepcopy(parent)
    for name, model in (("fine-tuned", finetuned), ("recast", child)):
        torch.manual_seed(1)  # the same batches, in the same crops
        optimizer = train(model, training, options.epochs, options.lr, device)
        print(f"{name}: top-1 {top1(model, validation, device):.1f} % of {len(validation.dataset)} images")
    print(recast.awake(child, example, optimizer))

    recast.save(child, options.out, constructor=built, classes=classes)
    with torch.no_grad():
        is_same = torch.equal(recast.load(options.out).to(device)(example), child(example))
    print(f"written: {options.out}, read back with the same outputs: {is_same}")


if __name__ == "__main__":
    main()
