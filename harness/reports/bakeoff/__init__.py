"""What people read of a bake-off: its table, results.md, results.png and report.html.

`save` writes the files; `texts` has results.md and what the terminal shows, `page` the parts of report.html. Their
parts: `question` and its answer, `table`, `notes`, `differences`, `plots`, `curves`, `pairs`, `fidelity`, `mistakes`,
`answers` of language models, `tuning`.
"""
