"""What happens to a net after its run: predictions, exported folders, models of transformers, int8, latency, a hub.

`export_folder` says what an exported folder holds, and who reads it. Nothing below this package imports it; `kd.py`
enters it by the name of `students`, where a run exports something.
"""
