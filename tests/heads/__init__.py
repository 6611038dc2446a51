"""Tests of trained heads."""
