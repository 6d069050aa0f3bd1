"""Parts of `bench.launch`: jobs in a Slurm of this machine, and what they leave."""
