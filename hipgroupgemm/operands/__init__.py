"""Everybody's arrays as pointers, shapes, strides, types, devices and streams, and results back."""
