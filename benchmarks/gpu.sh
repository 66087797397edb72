#!/bin/sh
# Decoding on one GPU of 40 GB or more, in under eight minutes:
#
#     sh benchmarks/gpu.sh [--dry-run] [DIRECTORY]
#
# Speed: the bundled model in the sizes of Qwen3-8B and Qwen3-0.6B, in bfloat16, left to right, exact, threshold and
# masked diffusion, at batch 1, 8 and 32; the bytes a second of a forward pass beside those of a copy. Parity: the
# answers of the bundled model on the CPU in float32, beside those on the GPU in float32 (equal, but for near-ties) and
# in bfloat16 at 0.6B (the differences are counted).
#
# Writes to DIRECTORY, benchmarks/results/DATE-CHIP if none is given. What does not fit into the time is left out:
# benchmark.json is written after every batch size. --dry-run prints the commands.
#
# Settings, in the environment: PYTHON, the one in .venv if there is one, and SECONDS_IN_ALL.
set -u
here=$PWD
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
limit=${SECONDS_IN_ALL:-465}
dry=
if [ "${1:-}" = --dry-run ]; then dry=yes; shift; fi

look='
import importlib.util, jax
device = jax.devices()[0]
chip = device.device_kind.lower().replace(" ", "-")
print(device.platform, chip, "" if importlib.util.find_spec("matplotlib") else "--no-figure")
'
if [ -n "$dry" ]; then
    found="gpu chip"
else
    found=$("$python" -c "$look") || { echo "gpu.sh: $python cannot import jax; set PYTHON" >&2; exit 2; }
fi
read -r platform chip figure <<END
$found
END
if [ "$platform" != gpu ]; then
    echo "gpu.sh: there is no GPU that jax can use (it found: $platform); install refusion_jax[cuda] on a machine with one" >&2
    exit 2
fi
directory=${1:-$PWD/benchmarks/results/$(date +%Y-%m-%d)-$chip}
case $directory in
/*) ;;
*) directory=$here/$directory ;;
esac
started=$(date +%s)
failed=

# benchmark NAME OPTIONS...: one run, with what is left of the time.
benchmark() {
    name=$1
    shift
    set -- -m refusion_jax.evaluation.benchmark --output "$directory/$name" ${figure:+"$figure"} "$@"
    if [ -n "$dry" ]; then
        echo "$python $*"
        return
    fi
    left=$((started + limit - $(date +%s)))
    if [ "$left" -lt 20 ]; then # loading alone takes as long
        echo "$name: left out, the time is spent" >&2
        return 1
    fi
    mkdir -p "$directory"
    timeout --signal=INT --kill-after=10 "$left" "$python" "$@" >"$directory/$name.txt" 2>&1
}

# show NAME: what a run printed, if it ended well; else that it did not.
show() {
    code=$?
    [ -z "$dry" ] || return
    printf '\n== %s, %d s since the begin\n' "$1" $(($(date +%s) - started))
    if [ -e "$directory/$1.txt" ]; then tail -n 100 "$directory/$1.txt"; fi
    if [ "$code" -ne 0 ]; then
        failed="$failed $1"
        echo "$1 was not finished (exit code $code); $directory/$1 holds what there is" >&2
    fi
}

parity="--prompts worksheets:0:64 --methods ar,exact-16-32 --batch-sizes 8 --repeats 1 --dtype float32"
speed="--methods ar,exact-16-32,threshold-32-32-0.4,mdm-above-0.9 --batch-sizes 1,8,32 --repeats 2 --dtype bfloat16"
answers=$directory/parity-cpu/answers.json

# On the CPU while the largest model compiles for the GPU.
if [ -n "$dry" ]; then
    benchmark parity-cpu $parity
else
    (
        JAX_PLATFORMS=cpu
        export JAX_PLATFORMS
        benchmark parity-cpu $parity
    ) &
    reference=$!
fi

benchmark 8b --shape qwen3_8b --prompts worksheets:0:32 $speed
show 8b

[ -n "$dry" ] || wait "$reference"
show parity-cpu
against=--compare=$answers
if [ -z "$dry" ] && [ ! -e "$answers" ]; then
    echo "parity is left out: there are no answers of the CPU" >&2
    against=
fi
# In float32 a GPU multiplies in tf32 unless it is told not to.
JAX_DEFAULT_MATMUL_PRECISION=float32
export JAX_DEFAULT_MATMUL_PRECISION
benchmark parity-gpu ${against:+"$against"} $parity
show parity-gpu
unset JAX_DEFAULT_MATMUL_PRECISION

benchmark 0.6b --shape qwen3_0_6b --prompts worksheets:0:64 ${against:+"$against"} $speed
show 0.6b

[ -z "$dry" ] || exit 0
rm -f "$directory"/*/answers.json # large; parity has been counted
printf '\n%d s in all; %s\n' $(($(date +%s) - started)) "$directory"
if [ -n "$failed" ]; then
    echo "not finished:$failed" >&2
    exit 1
fi
