"""Training throughput, ours and PyTorch's, for gpu_check.py. Standard library only."""
import importlib.util
import json
import os
import sys

from gpu_commands import on_gpu, train
from gpu_session import HERE

# Training starts slowly: libraries are loaded, algorithms are tried. Then a figure takes SECONDS after WARM_UP seconds.
WARM_UP, SECONDS = 0.5, 2.0
MNIST = 60_000
# Images per second that decide the number of epochs of a run: about those of an H100 in bf16, at 1,024 and 128 images.
RATES = {"conv6": (215e3, 160e3), "keras": (245e3, 180e3), "deep": (860e3, 350e3), "lenet5": (2.9e6, 820e3),
         "layers": (530e3, 190e3), "ensemble2400": (1.2e6, 440e3), "ensemble4800": (1.1e6, 350e3)}
# What slower choices take of these rates.
SLOWER = {"builtin": 2.5, "tf32": 2.2, "f32": 12.0}


def steady(path):
    """Images per second in the epochs after the warm-up: the median, the whole range relative to it, and the seconds."""
    with open(path) as file:
        epochs = [json.loads(line) for line in file]
    warm, kept = 0.0, []
    for epoch in epochs:
        if warm < WARM_UP:
            warm += epoch["train_s"]
        else:
            kept.append(epoch)
    kept = kept or epochs[-1:]
    rates = sorted(epoch["images_per_s"] for epoch in kept)
    median = rates[len(rates) // 2]
    return {"images_per_s": round(median, 1), "spread": round((rates[-1] - rates[0]) / median, 4), "epochs": len(kept),
            "seconds": round(sum(epoch["train_s"] for epoch in kept), 2)}


def throughput(s, net, batch, precision, choice, attempt=1):
    """Every figure is the median of whole epochs, so that no part of an epoch counts more than another. `choice` is that of
    --kernels, or `narrow`: auto with --narrow-gradients."""
    name = f"{net} {batch} {precision} {choice}" + (f", run {attempt}" if attempt > 1 else "")
    kernels = ["auto", "--narrow-gradients"] if choice == "narrow" else [choice]
    metrics = os.path.join(s.scratch, "metrics.jsonl")
    if os.path.exists(metrics):
        os.remove(metrics)
    rate = RATES[net][batch < 1024] / SLOWER.get(choice, 1.0) / SLOWER.get(precision, 1.0)
    # Half as much again: this GPU may be faster.
    epochs = max(2, round(1.5 * (WARM_UP + SECONDS) * rate / MNIST) + 1)
    length = ["--steps", 3] if s.fake else ["--epochs", epochs]
    run = s.run(name, train(s, 1, "--net", net, "--batch", batch, *length, "--precision", precision, "--kernels", *kernels,
                            "--skip-test", "--show-kernels", "--metrics", metrics, "--json"),
                limit=60, judge=on_gpu, keep="^(conv|dense) ")
    if not run or run["problem"] or s.fake:
        return
    result, figure = run["result"], steady(metrics)
    result["images_per_s_whole_run"], result["images_per_s"] = result["images_per_s"], figure["images_per_s"]
    s.add("throughput", [{"net": net, "batch": batch, "precision": precision, "kernels": choice, "mode": "graph", **figure,
                          "ms_per_step": round(1e3 * batch / figure["images_per_s"], 4),
                          "gpu_mib": result["max_gpu_mib"], "layers": run["lines"]}])
    print(f"       {figure['images_per_s']:,.0f} images/s in {figure['seconds']} s, range {figure['spread']:.1%}", flush=True)


def pytorch(s, modes, most=150):
    """One process for all configurations, because its start takes seconds. It uses at most `most` seconds."""
    net, batch, precision, mode = modes[0]
    name = f"PyTorch {precision} {mode}" if len(modes) > 1 else f"PyTorch {net} {batch} {precision} {mode}"
    if s.fake or not s.data or not importlib.util.find_spec("torch"):
        return s.skip(name, "a fake GPU is not measured" if s.fake else "no MNIST folder, or no torch in this Python")
    limit = min(most, s.left())
    run = s.run(name, [
        sys.executable, os.path.join(HERE, "torch_throughput.py"), s.data, "--seconds", f"{max(limit - 10, 1):.0f}",
    ], limit=limit, feed="".join(" ".join(map(str, mode)) + "\n" for mode in modes), keep=r'^\{"(net|torch)"')
    lines = [json.loads(line) for line in (run or {}).get("lines", [])]
    for versions in (line for line in lines if "torch" in line):
        s.versions.update(versions)
    figures = [line for line in lines if "net" in line]
    s.add("torch", figures)
    for figure in figures:
        print("       " + " ".join(f"{key} {value}" for key, value in figure.items()), flush=True)
    measured = {(figure["net"], figure["batch"], figure["precision"], figure["mode"]) for figure in figures
                if "images_per_s" in figure}
    for mode in modes if figures else []:
        if mode not in measured:
            s.skip("PyTorch " + " ".join(map(str, mode)), "see its line in `torch`")
