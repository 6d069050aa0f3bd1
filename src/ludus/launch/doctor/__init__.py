"""What is wrong with a machine before a run finds out: looked at by one file for each subject, judged by pure functions beside it."""
