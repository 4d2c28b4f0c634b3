"""The `"lazytrain"` block of a DeepSpeed config: its keys (`schema`) and how a block is read (`parse`)."""
