"""Speed and memory against peers, one file per question; see docs/benchmarks.md."""
