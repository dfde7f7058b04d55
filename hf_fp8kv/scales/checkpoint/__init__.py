"""The files, configs and tensor names of checkpoints, for readers and writers of scales."""
