import json,random
recs={json.loads(l)['id']:json.loads(l) for l in open('/work/main/memcalib/data/starter/records.jsonl')}
pairs=[json.loads(l) for k in (1,2,3) for l in open(f'/tmp/exam/pairs_{k}.jsonl')]
rng=random.Random(51)
items={1:[],2:[]}; key={}
for p in pairs:
    r=recs[p['example_id']]
    b=p['response']; assert b.count(p['edit']['passage'])==1,p['pair_id']
    a=b.replace(p['edit']['passage'],p['edit']['replacement'],1)
    sides=[('before',b),('after',a)]; rng.shuffle(sides)
    for k,(side,text) in enumerate(sides,1):
        iid=f"item_{rng.randrange(10**6):06d}"
        while iid in key: iid=f"item_{rng.randrange(10**6):06d}"
        key[iid]={'pair_id':p['pair_id'],'side':side}
        atoms={m['atom_id']:m['text'] for m in r['memories']}
        it={'item':iid,'query':r['question'],'memory':[[{'atom':a_,'text':atoms[a_]} for a_ in blk['atom_ids']] for blk in r['memory_blocks']],'answer':text}
        if r.get('turns'): it['conversation']=r['turns']
        items[k].append(it)
for k in items:
    rng.shuffle(items[k])
    with open(f'/tmp/exam/read/half_{k}.jsonl','w') as f:
        for it in items[k]: f.write(json.dumps(it,ensure_ascii=False)+'\n')
json.dump(key,open('/tmp/exam/key.json','w'))
print(len(pairs),sum(len(open(f'/tmp/exam/read/half_{k}.jsonl').read()) for k in(1,2)))
