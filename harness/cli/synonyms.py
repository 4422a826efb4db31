"""What other programs call options of ours: the error of an unknown flag names the right one."""

import difflib
from collections.abc import Callable, Iterable

# Of ours the last word, with a value or an option of it after a space; then others' names for it, with _ for -.
OTHERS_NAMES = {
    "accelerator": "device",
    "accelerator cpu": "cpu no_cuda use_cpu",
    "accelerator gpu": "cuda use_cuda",
    "accumulate_grad_batches": "accum_iter accumulate grad_accum grad_accum_steps gradient_accumulation_steps",
    "augment": "aug augmentation data_augmentation",
    "augment_repeats": "aug_repeats augmentation_repeats repeated_aug repeated_augmentation",
    "balanced": "balanced_sampler oversample sampler weighted_sampler",
    "batch_size": "b batch batchsize bs per_device_train_batch_size train_batch_size",
    "best_epoch": "best keep_best load_best load_best_model_at_end save_best",
    "callbacks EarlyStopping": "early_stop early_stopping early_stopping_patience patience",
    "class_weights": "class_weight pos_weight weighted",
    "cutmix": "cutmix_alpha",
    "data": "dataset",
    "devices": "device gpu gpu_id gpu_ids gpus n_gpu ngpus nproc num_devices num_gpus world_size",
    "dropout": "drop drop_rate",
    "early_stopping": "early_stop early_stopping_patience",
    "gradient_clip_val": "clip clip_grad clip_grad_norm grad_clip max_grad_norm",
    "image_size": "img_size input_size resolution",
    "data ImageFolder --data.image_size": "image_size img_size input_size resolution",
    "jobs": "concurrency max_concurrent max_jobs n_jobs num_jobs parallel",
    "kd_weight": "alpha kd_alpha",
    "label_smoothing": "smoothing",
    "label_noise": "noise noise_rate",
    "launcher": "engine executor",
    "launcher local": "multirun",
    "launcher local --launcher.jobs": "concurrency jobs max_concurrent max_jobs n_jobs num_jobs parallel",
    "launcher ray": "ray",
    "launcher slurm": "sbatch slurm submitit",
    "launcher slurm --launcher.account": "account slurm_account",
    "launcher slurm --launcher.minutes": "minutes slurm_time timeout_min walltime",
    "launcher slurm --launcher.partition": "partition queue slurm_partition",
    "list_layers": "layers",
    "log_every_n_steps": "log_interval logging_steps print_freq",
    "logger": "report_to tracker",
    "logger CSVLogger --trainer.logger.save_dir": "csv csv_logger",
    "logger MLFlowLogger": "mlflow",
    "logger WandbLogger": "wandb",
    "logger WandbLogger --trainer.logger.project": "project wandb_project",
    "ema": "ema_decay model_ema model_ema_decay use_ema",
    "export": "export_dir onnx save_onnx to_onnx",
    "lr": "base_lr init_lr learning_rate student_lr",
    "max_epochs": "epoch epochs max_epoch n_epochs nepochs num_epochs num_train_epochs",
    "max_steps": "iterations iters max_iter max_iters num_iters num_steps steps total_steps",
    "max_time": "budget time_budget time_limit",
    "metric": "eval_metric monitor",
    "metric top5": "top5 topk top_k",
    "mixup": "mixup_alpha",
    "net": "arch architecture model",
    "num_classes": "classes n_classes nb_classes",
    "num_nodes": "nnodes nodes",
    "num_workers": "dataloader_num_workers n_workers threads workers",
    "data ImageFolder --data.num_workers": "dataloader_num_workers n_workers num_workers threads workers",
    "optimizer": "opt optim",
    "optimizer SGD --optimizer.momentum": "momentum",
    "out": "experiment exp_name log_dir logdir name output output_dir save_dir save_path work_dir workdir",
    "overwrite": "force overwrite_output_dir",
    "precision": "dtype",
    "precision 16-mixed": "amp fp16 half mixed_precision use_amp",
    "precision bf16-mixed": "amp bf16",
    "profiler": "profile",
    "resume": "cont continue resume_from resume_from_checkpoint",
    "root": "data_dir data_path data_root dataroot",
    "data ImageFolder --data.root": "data_dir data_path data_root dataroot folder image_folder path",
    "save_ckpt": "save_model",
    "scheduler": "lr_sched lr_schedule lr_scheduler lr_scheduler_type sched",
    "scheduler CosineWarmup": "cosine warmup warmup_epochs warmup_ratio warmup_steps",
    "seeds": "num_runs num_seeds random_seed runs seed trial trials",
    "strategy": "dist distributed",
    "student": "arch architecture model model_s model_student student_model",
    "teacher": "model_t model_teacher teacher_model",
    "teacher_ckpt": "checkpoint ckpt load path_t pretrained teacher_checkpoint teacher_path teacher_weights weights",
    "teacher_optimizer .lr": "lr_teacher lr_t teacher_learning_rate teacher_lr",
    "temperature": "kd_t t tau temp temperature",
    "train_size": "n_train num_samples num_train subset_size",
    "tune": "n_trials num_trials sweep trials",
    "validation_size": "val val_size val_split valid_size validation_split",
    "variants.kd": "distill method",
    "weight_decay": "decay l2 wd",
    "zoo": "all_methods methods",
}
ALSO_CALLED = {
    name: [ours for ours, names in OTHERS_NAMES.items() if name in names.split()]
    for name in " ".join(OTHERS_NAMES.values()).split()
}


def near_flag(
    flag: str, names: Iterable[str], prefix: str = "", takes: Callable[[str, str], bool] = lambda *_: True
) -> str:
    """Return flags like this one, as the end of a message: near ones, those with its last word, and synonyms.

    `takes` says of a flag whether it can have a value: a synonym may need another class.
    """
    flags, name = {other.lower(): other for other in names}, flag.replace("-", "_").lower()
    last = name.rpartition(".")[2]
    matches = difflib.get_close_matches(name, flags, 3, 0.6) if "." in name else []
    for meant, _, more in (entry.partition(" ") for entry in [*ALSO_CALLED.get(last, []), last]):
        if more.rpartition("--")[2] not in flags:  # else it is there without choosing another class
            ends = [other for other in flags if f".{other}".endswith(f".{meant}")]
            needed = more.partition(" ")[0]
            ends = [other for other in ends if not needed or takes(other, needed)]
            matches += [f"{other} {more}".strip().replace(" .", ".") for other in ends]
    matches = [*dict.fromkeys(matches)] or difflib.get_close_matches(name, flags, 3, 0.6)
    listed = [prefix + flags.get(match, match) for match in matches[:3]]
    return f"; near: {', '.join(listed)}" if listed else ""
