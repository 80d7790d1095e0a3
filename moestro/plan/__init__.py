"""Planning: which layout of a workload on a cluster is best, and why."""
