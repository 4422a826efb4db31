"""What each student of a bake-off learnt by."""

from harness.reports.results import Results
from harness.reports.settings import write_value


def objectives(results: Results) -> dict[str, str]:
    """Say what each student learnt by, with all options; if it was tuned, those that were chosen."""
    variants = results.config.get("variants") or dict.fromkeys(results.students, results.config.get("net"))
    choices = {name: variants.get(student.variant or name) for name, student in results.students.items()}
    texts = {name: write_value(choices[name] or student.objective) for name, student in results.students.items()}
    for name, tuned in (results.search.methods if results.search else {}).items():
        chosen = tuned.settings[tuned.chosen].options
        of_optimizer = {option: value for option, value in chosen.items() if "." in option}
        of_method = {option: value for option, value in chosen.items() if option not in of_optimizer}
        choice = choices[name] or {"init_args": {}}
        text = write_value({**choice, "init_args": {**choice["init_args"], **of_method}})
        texts[name] = text + "".join(f", {option} {value}" for option, value in of_optimizer.items())
    return texts


def learnt(results: Results) -> str:
    """List what each student learnt by; without teachers, what each is."""
    lines = "\n".join(f"- {name}: {objective}" for name, objective in objectives(results).items())
    return f"{'Objectives of the students' if results.teacher else 'Nets'}:\n\n{lines}"
