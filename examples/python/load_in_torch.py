#!/usr/bin/env python3
"""Loads a checkpoint of train_mnist into PyTorch, and compares logits.

    pip install torch safetensors numpy
    train_mnist --net deep --steps 100 --checkpoint-dir ckpt --logits logits.json
    load_in_torch.py ckpt logits.json

The first argument is a checkpoint (ckpt/step-00000100) or a folder of checkpoints, whose newest one is used.

The tensors have the names and shapes of a torch.nn.Sequential, so they are loaded with load_state_dict. logits.json contains
test images and train_mnist's logits for them. Prints how far PyTorch's logits deviate, and exits with code 1 if that is more
than rounding errors allow (--bound).
"""
import argparse
import json
import pathlib
import re
import sys

try:
    import torch
    from safetensors.torch import load_file
    from torch import nn
except ImportError as error:
    # Checked after the checkpoint: --help and a wrong path need no PyTorch.
    missing_package = error.name
else:
    missing_package = None


def find_checkpoint(folder):
    """The checkpoint at `folder`, or the newest one in it."""
    if not folder.is_dir():
        sys.exit(f"{folder}: {'not a folder' if folder.exists() else 'there is no such folder'}")
    if (folder / "manifest.json").exists():
        return folder
    steps = {}
    for entry in folder.iterdir():
        name = re.fullmatch(r"step-([0-9]{8,})", entry.name)
        if name and (entry / "manifest.json").exists():
            steps[int(name[1])] = entry
    if not steps:
        sys.exit(f"{folder}: neither a checkpoint (it has no manifest.json) nor a folder with a checkpoint step-…")
    return steps[max(steps)]


def read_json(path, keys):
    """The JSON object in the file `path`, which must have all `keys`."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    except ValueError as error:
        sys.exit(f"{path}: not JSON: {error}")
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        sys.exit(f"{path}: not a file of train_mnist: missing keys: {', '.join(missing)}")
    return value


def load_arena(path):
    try:
        return load_file(path)
    except Exception as error:
        sys.exit(f"{path}: {error}")


def conv(before, filters, kernel, padding="same"):
    return nn.Conv2d(before, filters, kernel, padding=padding)


def network(name):
    """The network `name` as in examples/src/nets/catalogue.rs: one module for each entry there, so tensor names match."""
    relu, flatten, linear, dropout = nn.ReLU, nn.Flatten, nn.Linear, nn.Dropout
    if name == "lenet5":
        layers = [conv(1, 6, 5), relu(), nn.MaxPool2d(2), conv(6, 16, 5, "valid"), relu(), nn.MaxPool2d(2), flatten(),
                  linear(16 * 5 * 5, 120), relu(), linear(120, 84), relu(), linear(84, 10)]
    elif name == "deep":
        layers = [conv(1, 64, 5), relu(), nn.MaxPool2d(2), conv(64, 128, 5), nn.LeakyReLU(0.2), nn.MaxPool2d(2), flatten(),
                  linear(128 * 7 * 7, 1024), relu(), dropout(0.5), linear(1024, 10)]
    elif name == "keras":
        layers = [conv(1, 32, 3, "valid"), relu(), conv(32, 256, 3, "valid"), relu(), nn.BatchNorm2d(256),
                  conv(256, 128, 3, "valid"), relu(), nn.MaxPool2d(2), dropout(0.25), flatten(),
                  linear(128 * 11 * 11, 128), relu(), dropout(0.5), linear(128, 10)]
    elif name in ("ensemble2400", "ensemble4800"):
        wide, layers = int(name.removeprefix("ensemble")), []
        for before, filters in [(1, 64), (64, 64), (64, 128)]:
            layers += [conv(before, filters, 3), relu(), nn.MaxPool2d(2, ceil_mode=True), dropout(0.2)]
        layers += [flatten(), linear(128 * 4 * 4, wide), relu(), dropout(0.25), linear(wide, 10)]
    elif name == "layers":
        layers = [conv(1, 64, 5, "valid"), relu(), nn.MaxPool2d(2), conv(64, 256, 3, "valid"), relu(),
                  conv(256, 512, 3, "valid"), relu(), nn.MaxPool2d(2), flatten(), linear(512 * 4 * 4, 2048), dropout(0.75),
                  linear(2048, 1024), dropout(0.75), linear(1024, 10)]
    elif name == "conv6":
        layers, before = [], 1
        for kernel in (5, 3, 3):
            layers += [conv(before, 128, kernel), relu(), conv(128, 128, kernel), relu(), nn.MaxPool2d(2)]
            before = 128
        layers += [flatten(), linear(128 * 3 * 3, 10)]
    elif name == "mlp-gelu":
        layers = [flatten(), linear(28 * 28, 256), nn.GELU(), linear(256, 256), nn.GELU(), linear(256, 10)]
    else:
        sys.exit(f"there is no network {name!r}")
    return nn.Sequential(*layers)


def load(checkpoint, arena="weights"):
    """The network of the checkpoint in folder `checkpoint`, ready to evaluate. `arena` may be "average" if there is one."""
    manifest = checkpoint / "manifest.json"
    state = read_json(manifest, ["state"])["state"]
    if not isinstance(state, dict) or "net" not in state:
        sys.exit(f"{manifest}: not a checkpoint of train_mnist: its state has no network name")
    net = network(state["net"])
    tensors = load_arena(checkpoint / f"{arena}.safetensors")
    # Running statistics of batch normalisation are a separate arena.
    tensors |= load_arena(checkpoint / "buffers.safetensors")
    try:
        missing, unexpected = net.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        sys.exit(f"{checkpoint}: {error}")
    # The batch counter of batch normalisation: PyTorch has one, evaluation does not use it.
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if missing or unexpected:
        sys.exit(f"{checkpoint}: missing {missing}, unexpected {unexpected}")
    return state["net"], net.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=pathlib.Path, help="a folder step-…, or its parent folder for the newest checkpoint")
    parser.add_argument("logits", type=pathlib.Path, help="file written by train_mnist --logits")
    parser.add_argument("--bound", type=float, default=1e-5, help="largest deviation, relative to the largest logit")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    checkpoint = find_checkpoint(arguments.checkpoint)
    theirs = read_json(arguments.logits, ["net", "images", "logits"])
    if missing_package:
        sys.exit(f"cannot load {checkpoint}: Python has no {missing_package}: pip install torch safetensors numpy")
    name, net = load(checkpoint)
    if theirs["net"] != name:
        sys.exit(f"{arguments.logits} is of network {theirs['net']}, the checkpoint of {name}")
    images = torch.tensor(theirs["images"], dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
    expected = torch.tensor(theirs["logits"], dtype=torch.float32)
    with torch.no_grad():
        logits = net(images)
    deviation = (logits - expected).abs().max().item()
    largest = expected.abs().max().item()
    same = (logits.argmax(1) == expected.argmax(1)).sum().item()
    if arguments.json:
        print(json.dumps({"net": name, "deviation": deviation, "largest_logit": largest, "same_digit": same,
                          "images": len(expected)}))
    else:
        print(f"{name}: largest deviation {deviation:.2e}, largest logit {largest:.2f}, "
              f"same digit for {same} of {len(expected)}")
    return 0 if deviation <= arguments.bound * largest else 1


if __name__ == "__main__":
    sys.exit(main())
