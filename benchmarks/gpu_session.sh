#!/usr/bin/env bash
# Runs a list of benchmarks and tests on a GPU machine in one call, each with its own time limit.
#
#   benchmarks/gpu_session.sh [options] 'NAME[@SECONDS]: COMMAND' ...
#
#   benchmarks/gpu_session.sh -w wheels -o out \
#     'versions@60: python3 -m lazytrain_plugin.integration.cli doctor' \
#     'tests@400: pytest -q tests/kernels tests/integration/test_fused.py' \
#     '7b@200: python3 benchmarks/step.py --shape 7b --bs 32 --gpu-gib 31'
#
#   -w DIR      wheels to install first, without network and without touching the machine's own packages
#   -s DIR      where to install them (default: a folder beside the wheels; kept and reused if the wheels are the same)
#   -o DIR      logs and results (default: $OUT, else benchmarks/results/session)
#   -b SECONDS  budget of the whole session: a step gets at most what is left, and is skipped when nothing is
#   -t SECONDS  time limit of a step that names none (default 300)
#
# A step is a bash command line, run from the repository's root with the installed wheels first on PYTHONPATH and the
# checkout after them. Its output goes to DIR/NAME.log; every line of it that is a JSON object goes to
# DIR/results.jsonl with "step" added. A step that fails does not stop the others. Exit status 1 if any failed.
# Test the installed wheel with `pytest ...`; `python3 -m pytest ...` would put the checkout in front of it.
set -uo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
fail() { echo "gpu_session: $*" >&2; exit 2; }

repo=$(cd "$(dirname "$0")/.." && pwd)
wheels='' site='' out=${OUT:-$repo/benchmarks/results/session} budget_s=0 default_limit_s=300
while getopts 'w:s:o:b:t:h' option; do
  case $option in
    w) wheels=$OPTARG ;; s) site=$OPTARG ;; o) out=$OPTARG ;; b) budget_s=$OPTARG ;; t) default_limit_s=$OPTARG ;;
    h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { usage >&2; exit 2; }
mkdir -p "$out" && out=$(cd "$out" && pwd) || fail "can't make the folder $out; give another with -o"
session_start_s=$SECONDS

install_wheels() {
  local stamp
  shopt -s nullglob
  local files=("$wheels"/*.whl)
  [ ${#files[@]} -gt 0 ] || fail "no wheels in $wheels; collect some or leave -w out"
  site=${site:-$wheels/../site}
  stamp=$(sha256sum "${files[@]}" | sha256sum)
  if [ "$(cat "$site/.stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$site.new" && mkdir -p "$site.new"
    python3 -m pip install --quiet --no-index --no-deps --target "$site.new" "${files[@]}" >"$out/install.log" 2>&1 ||
      { tail -5 "$out/install.log" >&2; fail "pip could not install the wheels; see $out/install.log"; }
    echo "$stamp" >"$site.new/.stamp"
    # Only a folder that an earlier session made is replaced.
    [ ! -e "$site" ] || [ -e "$site/.stamp" ] || fail "$site exists and is not ours; give another with -s"
    rm -rf "$site" && mv "$site.new" "$site"
  fi
  site=$(cd "$site" && pwd)
  export PATH="$site/bin:$PATH"
}

# Copies the JSON objects of a log to results.jsonl, with the step's name.
collect_json() {
  python3 - "$1" "$2" >>"$out/results.jsonl" <<'PYTHON'
import json
import sys

with open(sys.argv[2], errors="replace") as log:
    for line in log:
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            print(json.dumps({"step": sys.argv[1], **found}))
PYTHON
}

[ -z "$wheels" ] || install_wheels
export PYTHONPATH="${site:+$site:}$repo${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
cd "$repo" || exit 2
python3 - >"$out/machine.json" <<'PYTHON' || echo "gpu_session: could not describe the machine" >&2
import importlib.metadata as metadata
import json
import os
import platform

import torch

names = ("torch", "triton", "transformers", "accelerate", "deepspeed", "lazytrain-plugin")
versions = {}
for name in names:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"gpus": gpus, "cpus": len(os.sched_getaffinity(0)), "python": platform.python_version(), **versions}))
PYTHON
cat "$out/machine.json"

summary=() failures=0
for step in "$@"; do
  [[ $step =~ ^([A-Za-z0-9_.-]+)(@([0-9]+))?:[[:space:]]*(.+)$ ]] || fail "not a step: '$step'; write 'NAME[@SECONDS]: COMMAND'"
  name=${BASH_REMATCH[1]} limit_s=${BASH_REMATCH[3]:-$default_limit_s} command=${BASH_REMATCH[4]}
  if [ "$budget_s" -gt 0 ]; then
    left_s=$((budget_s - (SECONDS - session_start_s)))
    if [ "$left_s" -lt 10 ]; then
      summary+=("$(printf '%-24s %8s  skipped: the session budget of %s s is used up' "$name" - "$budget_s")")
      failures=$((failures + 1))
      continue
    fi
    [ "$limit_s" -le "$left_s" ] || limit_s=$left_s
  fi
  echo "== $name (at most $limit_s s): $command"
  start_s=$SECONDS
  # TERM first, so that a test run can say where it was; KILL if it does not go.
  timeout --kill-after=10 "$limit_s" bash -c "$command" >"$out/$name.log" 2>&1
  status=$?
  case $status in
    0) verdict=ok ;;
    124 | 137) verdict="timed out after $limit_s s" ;;
    *) verdict="failed with status $status" ;;
  esac
  [ $status -eq 0 ] || failures=$((failures + 1))
  collect_json "$name" "$out/$name.log"
  tail -n 15 "$out/$name.log" | cut -c -600
  summary+=("$(printf '%-24s %6d s  %s' "$name" $((SECONDS - start_s)) "$verdict")")
done

printf '%s\n' "== summary" "${summary[@]}" | tee "$out/summary.txt"
[ $failures -eq 0 ]
