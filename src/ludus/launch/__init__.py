"""Jobs: groups of processes run on this machine, over SSH or by Slurm, behind one `Orchestrator` protocol."""
