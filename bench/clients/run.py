#!/usr/bin/env python3
"""Runs the scripts of this folder under mgpurun, and writes what works; called by bench/clients.sh.

    run.py [NAME…]
"""

import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import provenance  # noqa: E402 (the folder above)

PACKAGES = ["torch", "accelerate", "transformers", "lightning", "deepspeed", "jax", "jaxlib", "numpy"]
# The distribution that a script needs, its variables, and its command line behind `mgpurun`, for N ranks; D is an empty folder.
SCRIPTS = {
    "ddp": ("torch", {}, "--standalone --nproc_per_node=N ddp.py"),
    "fsdp2": ("torch", {}, "--nnodes=1 --nproc-per-node=N --rdzv-backend=c10d --rdzv-endpoint=localhost:0 fsdp2.py"),
    "dcp": ("torch", {}, "--nproc_per_node N --max_restarts 0 -r 2 -t 0:1 --log_dir D/logs dcp.py D/checkpoint"),
    "accelerate_loop": ("accelerate", {}, "--nproc_per_node N --master_port 29511 accelerate_loop.py"),
    "trainer": ("transformers", {}, "--standalone --nproc_per_node N --role trainer -m trainer D/out"),
    "lightning_fit": ("lightning", {}, "--nnodes 1 --node_rank 0 --nproc_per_node N --monitor_interval 1 lightning_fit.py"),
    "deepspeed_zero": ("deepspeed", {"TMPDIR": "D"}, "--nproc_per_node N --no_python python deepspeed_zero.py"),
    "jax_gloo": ("jax", {"PET_NPROC_PER_NODE": "N"}, "jax_gloo.py"),
}
# Nothing takes this long unless it hangs. Seconds.
LIMIT = 900


def launcher():
    named = os.environ.get("MGPURUN")
    built = [os.path.join(provenance.ROOT, "target", kind, "mgpurun") for kind in ("release", "debug")]
    found = [path for path in [named, *built] if path and os.access(path, os.X_OK)]
    if not found:
        sys.exit("there is no mgpurun: cargo build --release --package mgpurun, or set MGPURUN")
    return os.path.abspath(found[0])


def run(mgpurun, name, ranks):
    """What a script printed on so many ranks: its JSON object, or the end of its error."""
    _, variables, line = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as folder:
        def fill(word):
            return folder + word[1:] if word.startswith("D") else word.replace("N", str(ranks))

        words = [fill(word) for word in line.split()]
        # The scripts use the packages of this interpreter.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, **{key: fill(value) for key, value in variables.items()}}
        try:
            done = subprocess.run([mgpurun, "--no-prefix", *words], cwd=HERE, env=environment, capture_output=True,
                                  text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"error": f"no end after {LIMIT} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not found:
        return {"error": f"exit code {done.returncode}: {done.stderr[-600:]}"}
    return json.loads(found[-1])


def main():
    wanted = sys.argv[1:] or list(SCRIPTS)
    unknown = [name for name in wanted if name not in SCRIPTS]
    if unknown:
        sys.exit(f"no script {unknown[0]}: choose from {', '.join(SCRIPTS)}")
    mgpurun = launcher()
    versions = {package: provenance.package_version(sys.executable, package) for package in PACKAGES}
    results, failed = {}, False
    for name in wanted:
        package, variables, line = SCRIPTS[name]
        if versions[package] is None:
            print(f"{name}: skipped, no {package}", file=sys.stderr)
            results[name] = {"skipped": f"no {package}"}
            continue
        shown = " ".join([*(f"{key}={value}" for key, value in variables.items()), "mgpurun --no-prefix", line])
        results[name] = {"command": shown, "runs": []}
        for ranks in (2, 4):
            result = run(mgpurun, name, ranks)
            failed |= "error" in result or result["ranks"] != ranks
            print(f"{name}, {ranks} ranks: {json.dumps(result)}", file=sys.stderr)
            results[name]["runs"].append({"ranks": ranks, **result})
    if not sys.argv[1:]:
        path = provenance.result_path("clients")
        record = provenance.record(["bench/clients.sh"], {key: value for key, value in versions.items() if value})
        provenance.write(path, {**record, "clients": results})
        print(f"wrote {path}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
