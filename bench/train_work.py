"""FLOP per image in training, and elements between layers, from the shapes of the networks. Standard library only.

The layers are those of `examples/src/nets/catalogue.rs`. train.py compares the number of parameters, computed from the same
shapes, with that of both programs, so a network that changes only there is noticed.
"""

INPUT = (1, 28, 28)


def conv(filters, kernel, padding):
    return ("conv", filters, kernel, padding)


def dense(outputs):
    return ("dense", outputs)


FLOOR, CEIL, NORM = ("pool", 0), ("pool", 1), ("norm",)
# Layers that change no shape: activations, dropout, flatten.
ACT, DROP, FLAT = [("act",)] * 3


def ensemble(wide):
    convolutions = [layer for filters in (64, 64, 128) for layer in (conv(filters, 3, "same"), ACT, CEIL, DROP)]
    return convolutions + [FLAT, dense(wide), ACT, DROP, dense(10)]


# Indices are those of the layers that `train_mnist --cut` takes.
NETS = {
    "lenet5": [conv(6, 5, "same"), ACT, FLOOR, conv(16, 5, "valid"), ACT, FLOOR, FLAT, dense(120), ACT, dense(84), ACT,
               dense(10)],
    "deep": [conv(64, 5, "same"), ACT, FLOOR, conv(128, 5, "same"), ACT, FLOOR, FLAT, dense(1024), ACT, DROP, dense(10)],
    "keras": [conv(32, 3, "valid"), ACT, conv(256, 3, "valid"), ACT, NORM, conv(128, 3, "valid"), ACT, FLOOR, DROP, FLAT,
              dense(128), ACT, DROP, dense(10)],
    "ensemble2400": ensemble(2400),
    "ensemble4800": ensemble(4800),
    "layers": [conv(64, 5, "valid"), ACT, FLOOR, conv(256, 3, "valid"), ACT, conv(512, 3, "valid"), ACT, FLOOR, FLAT,
               dense(2048), DROP, dense(1024), DROP, dense(10)],
    "conv6": [layer for kernel in (5, 3, 3)
              for layer in (conv(128, kernel, "same"), ACT, conv(128, kernel, "same"), ACT, FLOOR)] + [FLAT, dense(10)],
}


def work(net):
    """FLOP per image and number of parameters.

    A layer's forward pass has `outputs · terms` multiplications and as many additions, where `terms` is the number of weights
    in the sum of one output: C·K·K, or the inputs of a dense layer. Its weight gradients take the same number, and so do its input
    gradients, which the first layer does not need. So 2 · outputs · terms · 3, or · 2 for the first layer. Convolutions count as
    sums over their taps: an algorithm with fewer multiplications (Winograd) is credited with all of them. Activations, pooling,
    normalisation and the optimizer are not counted.
    """
    flop = parameters = 0
    for _, terms, filters, outputs in shapes(net):
        if terms:
            flop += 2 * outputs * terms * (3 if parameters else 2)
            parameters += filters * (terms + 1)
    return flop, parameters + sum(2 * filters for kind, _, filters, _ in shapes(net) if kind == "norm")


def tensors(net):
    """Elements of the parameter tensors, in the order of the layers."""
    for kind, terms, filters, _ in shapes(net):
        if terms:
            yield from (filters * terms, filters)
        elif kind == "norm":
            yield from (filters, filters)


def outputs(net):
    """Elements per image after each layer: `outputs(net)[cut - 1]` of them cross a cut before layer `cut`."""
    return [elements for _, _, _, elements in shapes(net)]


def shapes(net):
    """Of each layer: its kind, the terms in the sum of an output (0 without weights), its channels, its elements per image."""
    channels, height, width = INPUT
    for layer in NETS[net]:
        kind, terms = layer[0], 0
        if kind == "pool":
            height, width = (height + layer[1]) // 2, (width + layer[1]) // 2
        elif kind == "conv":
            _, filters, kernel, padding = layer
            if padding == "valid":
                height, width = height - kernel + 1, width - kernel + 1
            channels, terms = filters, channels * kernel * kernel
        elif kind == "dense":
            channels, terms = layer[1], channels * height * width
            height = width = 1
        yield kind, terms, channels, channels * height * width


if __name__ == "__main__":
    for name in NETS:
        of_image, count = work(name)
        print(f"{name:<14} {of_image / 1e6:9.1f} MFLOP per image {count:12,} parameters")
