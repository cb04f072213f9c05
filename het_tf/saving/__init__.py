"""How rows lie in files, and get there from the parameter servers and back.

`cuts` are the rows of one moment, written in the `background`; `parts` those of a checkpoint,
`chains` those that changed since another one, `manager` the checkpoints of a training one after the
other, `weights_files` the rows of Keras's files, `descriptions` what files say of tables;
`versions` and `mapped` are of models that are served with the het_tf ops, `frozen` of those that
are without.
"""
