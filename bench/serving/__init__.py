"""HTTP serving stacks that `bench.gateway` compares, each a script that serves until it is told to end."""
