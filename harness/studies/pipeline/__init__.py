"""The study is in `lab`."""
