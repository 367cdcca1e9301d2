"""The Python API: the names of `import cotenant`, which the command line uses, too."""
