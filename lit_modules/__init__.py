"""What is learned: LightningModules, and the nets and objectives they are made of."""
