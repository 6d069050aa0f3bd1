"""Where the processes of a job run: on this machine now; queues and other machines are further backends of one protocol."""
