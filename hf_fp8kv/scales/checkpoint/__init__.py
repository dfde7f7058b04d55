"""The files, configs and tensor names of checkpoints that hold scales."""
