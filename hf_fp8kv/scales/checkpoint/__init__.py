"""A checkpoint as the readers and writers of scales see it: its files, configs and tensor names."""
