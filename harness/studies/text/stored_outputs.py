"""A teacher's outputs for texts in files (`teacher_top_k`): a run that finds them does not load the teacher."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from apprentice.errors import BadInput
from datamodules.text.base import TextData
from harness.runs.arm_names import choice_at
from harness.runs.facts import spec
from harness.runs.files import read_text, write_text
from harness.runs.launch import is_main_process
from harness.runs.nets import read_spec, save_net
from harness.runs.plans import Arm
from harness.runs.records import FitRecord
from harness.runs.session import Session
from harness.runs.teacher_weights import TEACHER, TEACHERS
from harness.studies.choices import is_from_teacher, make_net
from harness.studies.teachers import checkpoint_of, has_trained_teacher
from harness.studies.text.answers import judging_settings
from lit_modules.nets.served import Served
from lit_modules.nets.shared_tokens import SharedTokens
from lit_modules.nets.specs import path_of
from lit_modules.nets.stored import StoredTeacher
from lit_modules.objectives.text_objective import of_texts
from lit_modules.objectives.top_k import Tail
from lit_modules.text.stored_teacher import Stored, TextStore, form_of, read_texts

FLAG = "teacher_top_k"
READ = 2**24  # bytes at a time


class StoredOutputs:
    """What a run's seeds store of their teacher, or find stored. Nothing without `teacher_top_k`.

    `shared` are the tokens of the data that the teacher has, if some have other numbers there, or none.
    """

    def __init__(self, session: Session, arms: Iterable[Arm], shared: SharedTokens | None = None) -> None:
        self.session, self.config, self.shared = session, session.config, shared
        self.is_on = vars(self.config).get(FLAG) is not None
        teachers = [vars(self.config).get(TEACHER), *vars(self.config).get(TEACHERS, {}).values()]
        self.is_served = any(choice is not None and issubclass(choice.target, Served) for choice in teachers)
        listed = list(arms) if self.is_on else []
        self.objectives = {arm.name: arm.objective(self.config) for arm in listed}
        writes = any(of_texts(objective).teacher_writes for objective in self.objectives.values())
        self.needs_weights = writes or any(is_from_teacher(self.config, arm.net) for arm in listed)
        self._nets: dict[int, StoredTeacher | None] = {}
        self._files: dict[int, tuple[Path, StoredTeacher]] = {}
        self._sources: dict[int, str | None] = {}
        self._digest = ""

    def check(self) -> None:
        """Raise BadInput for settings with which outputs can't be stored, or a server that can't be asked."""
        if not self.is_on:
            if self.is_served:
                raise BadInput("teacher", "Served", f"`{FLAG} N` beside it: so many of its tokens are stored")
            return
        config, data = self.config, self.session.data
        if not cast("TextData", data).train_texts_repeat:
            same = "; `data.same_blocks true`" if "same_blocks" in config.data.init_args else ""
            raise BadInput(FLAG, config.teacher_top_k, f"texts that are the same in each epoch{same}")
        if config.tune and config.teacher_top_k != "all":
            raise BadInput(FLAG, config.teacher_top_k, "all, or no `tune`: k tokens are stored for given temperatures")
        if vars(config).get(TEACHERS):
            raise BadInput(
                FLAG, config.teacher_top_k, f"not allowed with `{TEACHERS}`: the outputs of one teacher are stored"
            )
        if self.is_served:
            if self.needs_weights:
                expected = "a teacher with weights for a student made of these, or one that learns what it writes"
                raise BadInput("teacher", "Served", expected)
            if self._file(config.seeds[0]) is None:
                cast("Served", make_net(config, TEACHER, 0, data.net_arguments)).check()

    def options(self, seed: int) -> Stored | None:
        """Return what is to be stored of a seed's teacher."""
        if not self.is_on:
            return None
        temperatures = {t for objective in self.objectives.values() for t in of_texts(objective).temperatures}
        tail: Tail = self.config.teacher_tail or "bucket"
        return Stored(self.config.teacher_top_k, tail, self.source(seed), tuple(sorted(temperatures)), self.is_served)

    def net(self, seed: int) -> StoredTeacher | None:
        """Return a stand-in for a seed's teacher if its outputs are there, and its test for the same data.

        None where a student is made of its weights, or of what it writes: then it is loaded, but does not run. None,
        too, where the run's folder has the teacher itself: seeds that a run is resumed for get the figures that they
        would have had at once.

        Raises:
            BadInput: the file is there, but changed or damaged.
        """
        if seed not in self._nets and (not self.is_on or self.needs_weights or self._has_weights(seed)):
            self._nets[seed] = None
        elif seed not in self._nets:
            found = self._file(seed)
            has_test = found is not None and self._record(found[0]).exists()
            self._nets[seed] = found[1] if found is not None and has_test else None
        return self._nets[seed]

    def _has_weights(self, seed: int) -> bool:
        """Return whether the folder that the run goes on with has the weights of a seed's teacher."""
        if not (self.config.out and self.config.resume):
            return False
        out = Path(self.config.out)
        folder = out / f"seed{seed}" / TEACHER
        if (folder / "net.yaml").exists():
            return not is_stand_in(folder)
        folders = (path.parent for path in out.glob(f"seed[0-9]*/{TEACHER}/net.yaml"))
        loaded = [int(other.parent.name.removeprefix("seed")) for other in folders if not is_stand_in(other)]
        return any(self.source(other) == self.source(seed) for other in loaded)

    def take_record(self, seed: int) -> None:
        """Write into the run's folder the record of the teacher's test by an earlier run, and a net of no weights."""
        net, folder = self.net(seed), self.session.out / f"seed{seed}"
        target = folder / f"{TEACHER}.json"
        if net is None or target.exists() or not is_main_process():
            return
        path, _ = self._file(seed) or (Path(), None)
        folder.mkdir(parents=True, exist_ok=True)
        save_net(net, spec(path_of(StoredTeacher), net.init_args), folder / TEACHER, self.session.net_facts())
        write_text(target, read_text(self._record(path)))
        FitRecord.read(target)

    def keep_record(self, seed: int) -> None:
        """Write the record of the teacher's test beside the file, for later runs."""
        record = self.session.out / f"seed{seed}" / f"{TEACHER}.json"
        if self.is_on and is_main_process() and record.exists() and (found := self._file(seed)):
            target = self._record(found[0])
            if not target.exists():
                write_text(target, read_text(record))

    def _file(self, seed: int) -> tuple[Path, StoredTeacher] | None:
        """Find a seed's file; None where the teacher is not known without its weights."""
        options = self.options(seed)
        if seed in self._files or options is None or options.source is None:
            return self._files.get(seed)
        data, config = self.session.data, self.config
        absent = [] if self.shared is None else self.shared.absent.tolist()
        net = StoredTeacher(data.num_classes, options.source, absent)
        form = form_of(options, self.objectives, data.num_classes)
        store = TextStore(net, config.teacher_cache_dir, form, data.num_classes, options.source, self.session.tell)
        texts = read_texts(data.train_in_order(), data.places)
        path = store.find(texts, str(self.session.trainer().precision))
        if path is not None:
            self._files[seed] = path, net
        return self._files.get(seed)

    def _record(self, path: Path) -> Path:
        """Return the page of the teacher's test, beside its outputs: on the same data, judged alike."""
        if not self._digest:
            used = self.session.data.used(self.session.trainer())
            tested: tuple[Any, ...] = self.session.data.fingerprint()["test"], used["test"], str(self.config.metric)
            tested += judging_settings(self.config)
            self._digest = hashlib.blake2b(repr(tested).encode(), digest_size=8).hexdigest()
        return path / f"test-{self._digest}.json"

    def source(self, seed: int) -> str | None:
        """Return what tells a teacher that is loaded without loading it: its options, and the content of files.

        None if outputs are not stored.
        """
        if self.is_on and seed not in self._sources:
            chosen, config = choice_at(self.config, TEACHER), self.config
            options = {**chosen.init_args, "teacher_ckpt": checkpoint_of(self.session, seed)}
            if self.shared is not None:
                options["tokens"] = self.shared.numbers.tolist()
            options["teacher_ckpt_ema"] = config.teacher_ckpt_ema
            if self.is_served:
                del options["url"]  # another server may have the same model
                options["model"] = [options["model"]]  # a name, whatever lies at such a path
            is_known = has_trained_teacher(self.session)
            self._sources[seed] = _digest_options(chosen.class_path, options) if is_known else None
        return self._sources.get(seed)


def is_stand_in(folder: Path) -> bool:
    """Return whether a folder's net is one without weights; BadInput if there is none."""
    return read_spec(folder, "out")["class_path"] in {path_of(StoredTeacher), path_of(Served)}


def _digest_options(class_path: str, options: Mapping[str, Any]) -> str | None:
    """Hash options and the content of files that they name; None for a model of the hub that is not here yet."""
    known = []
    for name, value in sorted(options.items()):
        content = _digest_content(value) if isinstance(value, str) else repr(value)
        if content is None and name == "name":
            return None
        known.append((name, content or value))
    return hashlib.blake2b(repr([class_path, known]).encode(), digest_size=16).hexdigest()


def _digest_content(value: str) -> str | None:
    """Hash what is in a file or a folder; return the commit of a model of the hub that was downloaded, else None."""
    path = Path(value).expanduser()
    if path.exists():
        digest = hashlib.blake2b(digest_size=16)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in (file for file in files if file.is_file() and file.suffix not in {".py", ".pyc"}):
            digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
            with file.open("rb") as content:
                while part := content.read(READ):
                    digest.update(part)
        return digest.hexdigest()
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(value, "config.json")
    except (ImportError, ValueError):
        return None
    return Path(config).parent.name if isinstance(config, str) else None
