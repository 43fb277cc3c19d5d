"""The networks of `examples/src/nets/catalogue.rs` in PyTorch, their optimizers, and a reader of MNIST's files."""

import gzip
import struct

import torch
from torch import nn

_ENSEMBLE = "conv 64 3 same, relu, pool ceil, dropout 0.2, conv 64 3 same, relu, pool ceil, dropout 0.2, " \
            "conv 128 3 same, relu, pool ceil, dropout 0.2, dense {}, relu, dropout 0.25, dense 10"
# conv FILTERS KERNEL PADDING, dense OUTPUTS; an input is 1×28×28.
LAYERS = {
    "lenet5": "conv 6 5 same, relu, pool, conv 16 5 valid, relu, pool, dense 120, relu, dense 84, relu, dense 10",
    "deep": "conv 64 5 same, relu, pool, conv 128 5 same, leaky 0.2, pool, dense 1024, relu, dropout 0.5, dense 10",
    "keras": "conv 32 3 valid, relu, conv 256 3 valid, relu, norm, conv 128 3 valid, relu, pool, dropout 0.25, "
             "dense 128, relu, dropout 0.5, dense 10",
    "ensemble2400": _ENSEMBLE.format(2400),
    "ensemble4800": _ENSEMBLE.format(4800),
    "layers": "conv 64 5 valid, relu, pool, conv 256 3 valid, relu, conv 512 3 valid, relu, pool, dense 2048, "
              "dropout 0.75, dense 1024, dropout 0.75, dense 10",
    "conv6": ", ".join(f"conv 128 {kernel} same, relu, conv 128 {kernel} same, relu, pool" for kernel in (5, 3, 3))
             + ", dense 10",
    "mlp-gelu": "dense 256, gelu, dense 256, gelu, dense 10",
}
ADAM_RATES = {"deep": 1e-4}
RMSPROP = ("keras", "ensemble2400", "ensemble4800")


def build(name):
    """The network `name`, as a torch.nn.Sequential with PyTorch's own initial weights."""
    modules, channels, side, is_flat = [], 1, 28, False
    for layer in LAYERS[name].split(", "):
        kind, *values = layer.split()
        if kind == "conv":
            filters, kernel = int(values[0]), int(values[1])
            modules.append(nn.Conv2d(channels, filters, kernel, padding=values[2]))
            channels, side = filters, side if values[2] == "same" else side - kernel + 1
        elif kind == "pool":
            ceil = values == ["ceil"]
            modules.append(nn.MaxPool2d(2, ceil_mode=ceil))
            side = (side + ceil) // 2
        elif kind == "dense":
            if not is_flat:
                modules.append(nn.Flatten())
                channels, is_flat = channels * side * side, True
            modules.append(nn.Linear(channels, int(values[0])))
            channels = int(values[0])
        else:
            modules.append({
                "relu": nn.ReLU, "leaky": lambda: nn.LeakyReLU(float(values[0])), "gelu": nn.GELU,
                "dropout": lambda: nn.Dropout(float(values[0])), "norm": lambda: nn.BatchNorm2d(channels),
            }[kind]())
    return nn.Sequential(*modules)


def optimizer(name, parameters, is_fused, is_captured):
    """Its optimizer. Fused (Adam only) where asked for; `is_captured` allows steps in a CUDA graph.

    L2 penalty and moving average of `deep` are left out: PyTorch does less work than train_mnist there.
    """
    if name in RMSPROP:
        return torch.optim.RMSprop(parameters, lr=1e-3, alpha=0.9, capturable=is_captured)
    return torch.optim.Adam(parameters, lr=ADAM_RATES.get(name, 1e-3), fused=is_fused, capturable=is_captured)


def read_idx(path):
    """The values of a gzipped IDX file of bytes, as a tensor of its shape."""
    with gzip.open(path) as file:
        content = bytearray(file.read())
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape)


def training_set(folder):
    """Images as float from 0 to 1 [60000, 1, 28, 28], and their labels, from MNIST's files in `folder`."""
    images = read_idx(f"{folder}/train-images-idx3-ubyte.gz").unsqueeze(1).to(torch.float32).div_(255)
    return images, read_idx(f"{folder}/train-labels-idx1-ubyte.gz").to(torch.int64)
