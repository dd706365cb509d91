"""The data room: text -> tokens -> rows -> batches, without JAX.

Read in this order, each file one idea:

    readers      files of text, JSON lines or Parquet -> documents, streamed
    corpora      the bundled corpora, and what a source's name means
    tokenizer    text <-> ids, lossless for any text
    pieces       a document -> pieces, cut at fixed byte offsets
    split        which documents are held out
    store        pieces of ids on disk, memory-mapped
    prepare      all of the above, once, kept in a cache
    permutation  a shuffle that is a formula
    packing      shuffled pieces -> rows of a fixed length, every token accounted for
    mixture      which source gives which row
    loader       rows -> the batch of step n, a pure function of (seed, n)
"""
