"""The plan explorer: a local web page on which a run, a machine and a plan are picked, and all that follows is seen."""
