"""`python -m hf_fp8kv_cli`, which is equivalent to the script `hf-fp8kv`."""

import sys

from . import NAME, main

# Benchmarks record this as their command.
sys.argv[0] = NAME
main()
