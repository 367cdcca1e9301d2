"""SIR+: one wide graph over several devices. See README.md."""
