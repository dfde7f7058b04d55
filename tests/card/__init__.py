"""Tests of model cards."""
