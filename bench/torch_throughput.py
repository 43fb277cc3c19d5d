"""Training throughput of many configurations of PyTorch on a GPU, in one process.

Run: python torch_throughput.py DATA [--seconds SECONDS] < CONFIGURATIONS

Reads one configuration per line, NET BATCH PRECISION MODE, from standard input; prints versions, then one line of JSON for each.
DATA is the MNIST folder. SECONDS limit the whole: a configuration that does not fit any more is left out, with a line that says
so. peers/train_torch.py does the same for a single configuration: channels-last, fused Adam, cudnn.benchmark, images on the
GPU, random batches. PRECISION is bf16 (autocast), tf32 or f32; MODE is eager, compiled
(max-autotune, no CUDA graphs) or graphed (the step is captured and replayed).
"""
import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers"))
import torch
import torch.nn.functional as F
from nets_torch import build, optimizer, training_set

WARM_SECONDS, SECONDS = 0.5, 2.0
# Expected duration of a configuration in bf16, with its start.
EXPECTED = {"eager": 8, "graphed": 8, "compiled": 90}
LAYOUT = torch.channels_last
END = time.time() + float(sys.argv[3]) if sys.argv[2:3] == ["--seconds"] else float("inf")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU")
versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
print(json.dumps(versions), flush=True)
IMAGES, LABELS = training_set(sys.argv[1])


def measure(name, size, precision, mode):
    device = torch.device("cuda", 0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "f32"
    torch.manual_seed(777)
    images, labels = IMAGES.to(device, memory_format=LAYOUT), LABELS.to(device)
    graphed = mode == "graphed"
    model = build(name).to(device, memory_format=LAYOUT)
    update = optimizer(name, model.parameters(), True, graphed)
    forward = torch.compile(model, mode="max-autotune-no-cudagraphs") if mode == "compiled" else model
    random = torch.Generator(device=device).manual_seed(0)

    def step(x, y):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(forward(x), y)
        update.zero_grad(set_to_none=not graphed)
        loss.backward()
        update.step()
        return loss

    def batch():
        pick = torch.randint(0, len(images), (size,), generator=random, device=device)
        return images[pick].contiguous(memory_format=LAYOUT), labels[pick]

    if graphed:
        # No tensor of the default stream may be alive when the step is captured.
        x, y = batch()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(11):
                step(x, y)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(x, y)

    def run(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            images_of_step, labels_of_step = batch()
            if graphed:
                x.copy_(images_of_step)
                y.copy_(labels_of_step)
                graph.replay()
            else:
                step(images_of_step, labels_of_step)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run(10)
    each = run(30) / 30
    run(int(WARM_SECONDS / each) + 1)
    steps = int(SECONDS / each) + 30
    each = run(steps) / steps
    return {"images_per_s": round(size / each, 1), "ms_per_step": round(each * 1e3, 4), "steps": steps,
            "seconds": round(each * steps, 2)}


configurations = [line.split() for line in sys.stdin if line.strip()]
while configurations:
    name, size, precision, mode = configurations.pop(0)
    configuration = {"net": name, "batch": int(size), "precision": precision, "mode": mode}
    if time.time() + EXPECTED[mode] > END:
        print(json.dumps({**configuration, "error": "not measured: no time left"}), flush=True)
        continue
    try:
        print(json.dumps({**configuration, **measure(name, int(size), precision, mode)}), flush=True)
    except Exception as error:
        print(json.dumps({**configuration, "error": (str(error) or repr(error)).splitlines()[0][:200]}), flush=True)
        # The CUDA context may be unusable now: a new process continues.
        if configurations:
            read, write = os.pipe()
            os.write(write, "".join(" ".join(words) + "\n" for words in configurations).encode())
            os.close(write)
            os.dup2(read, 0)
            limit = ["--seconds", str(END - time.time())] if END < float("inf") else []
            os.execv(sys.executable, [sys.executable, *sys.argv[:2], *limit])
    torch.compiler.reset()
    torch.cuda.empty_cache()
