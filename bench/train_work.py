"""FLOP per image in training, from the shapes of the networks. Standard library only.

The layers are those of `examples/src/nets/catalogue.rs`. train.py compares the number of parameters, computed from the same
shapes, with that of both programs, so a network that changes only there is noticed.
"""

INPUT = (1, 28, 28)


def conv(filters, kernel, padding):
    return ("conv", filters, kernel, padding)


def dense(outputs):
    return ("dense", outputs)


FLOOR, CEIL, NORM = ("pool", 0), ("pool", 1), ("norm",)


def ensemble(wide):
    return [conv(64, 3, "same"), CEIL, conv(64, 3, "same"), CEIL, conv(128, 3, "same"), CEIL, dense(wide), dense(10)]


NETS = {
    "lenet5": [conv(6, 5, "same"), FLOOR, conv(16, 5, "valid"), FLOOR, dense(120), dense(84), dense(10)],
    "deep": [conv(64, 5, "same"), FLOOR, conv(128, 5, "same"), FLOOR, dense(1024), dense(10)],
    "keras": [conv(32, 3, "valid"), conv(256, 3, "valid"), NORM, conv(128, 3, "valid"), FLOOR, dense(128), dense(10)],
    "ensemble2400": ensemble(2400),
    "ensemble4800": ensemble(4800),
    "layers": [conv(64, 5, "valid"), FLOOR, conv(256, 3, "valid"), conv(512, 3, "valid"), FLOOR, dense(2048), dense(1024),
               dense(10)],
    "conv6": [layer for kernel in (5, 3, 3)
              for layer in (conv(128, kernel, "same"), conv(128, kernel, "same"), FLOOR)] + [dense(10)],
}


def work(net):
    """FLOP per image and number of parameters.

    A layer's forward pass has `outputs · terms` multiplications and as many additions, where `terms` is the number of weights
    in the sum of one output: C·K·K, or the inputs of a dense layer. Its weight gradients take the same number, and so do its input
    gradients, which the first layer does not need. So 2 · outputs · terms · 3, or · 2 for the first layer. Convolutions count as
    sums over their taps: an algorithm with fewer multiplications (Winograd) is credited with all of them. Activations, pooling,
    normalisation and the optimizer are not counted.
    """
    channels, height, width = INPUT
    flop = parameters = 0
    for layer in NETS[net]:
        kind = layer[0]
        if kind == "pool":
            height, width = (height + layer[1]) // 2, (width + layer[1]) // 2
            continue
        if kind == "norm":
            parameters += 2 * channels
            continue
        if kind == "conv":
            _, filters, kernel, padding = layer
            if padding == "valid":
                height, width = height - kernel + 1, width - kernel + 1
            terms = channels * kernel * kernel
        else:
            filters, terms = layer[1], channels * height * width
            height = width = 1
        flop += 2 * filters * height * width * terms * (3 if parameters else 2)
        parameters += filters * (terms + 1)
        channels = filters
    return flop, parameters


if __name__ == "__main__":
    for name in NETS:
        of_image, count = work(name)
        print(f"{name:<14} {of_image / 1e6:9.1f} MFLOP per image {count:12,} parameters")
