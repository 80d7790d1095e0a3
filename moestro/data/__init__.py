"""From text to batches: sources → tokenizer → shards → packed sequences → weighted mixture → batches.

Import from the submodules (`moestro.data.prepare`, `moestro.data.batches`, ...). Nothing is re-exported here, so that
tools which only read text or pack do not load torch; `batches` is the one module that does.
"""
