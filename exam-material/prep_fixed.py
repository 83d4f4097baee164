import json,random,hashlib
recs={json.loads(l)['id']:json.loads(l) for l in open('/work/wt/exam/memcalib/data/starter/records.jsonl')}
P={json.loads(l)['pair_id']:json.loads(l) for l in open('/tmp/exam/pairs_fixed.jsonl')}
log=json.load(open('/tmp/exam/fixed.json'))
todo=sorted({p for p,v in log.items() if 'text' in v and p in P}|{'new_1_061','new_2_062','new_3_004','new_3_040','new_3_042','new_3_046','new_3_060'})
rng=random.Random(5104); key={}; A=[];B=[]
for pid in todo:
    p=P[pid]; r=recs[p['example_id']]; b=p['response']; assert b.count(p['edit']['passage'])==1,pid
    a=b.replace(p['edit']['passage'],p['edit']['replacement'],1)
    s=[('before',b),('after',a)]; rng.shuffle(s)
    for k,(side,t) in enumerate(s):
        iid=f"item_{rng.randrange(10**6):06d}"
        while iid in key: iid=f"item_{rng.randrange(10**6):06d}"
        key[iid]={'pair_id':pid,'side':side,'hash':hashlib.sha256(t.encode()).hexdigest()[:16]}
        atoms={m['atom_id']:m['text'] for m in r['memories']}
        it={'item':iid,'query':r['question'],'memory':[[{'atom':x,'text':atoms[x]} for x in blk['atom_ids']] for blk in r['memory_blocks']],'answer':t}
        if r.get('turns'): it['conversation']=r['turns']
        (A,B)[k].append(it)
rng.shuffle(A);rng.shuffle(B)
with open('/tmp/exam/read/fixed.jsonl','w') as f:
    for it in A+B: f.write(json.dumps(it,ensure_ascii=False)+'\n')
json.dump(key,open('/tmp/exam/key_fixed.json','w'))
print(len(todo),len(A+B))
# hashes of what was read before
for kf,files in (('/tmp/exam/key.json',('half_1','half_2')),('/tmp/exam/key_labels.json',('labels',))):
    k=json.load(open(kf))
    for fn in files:
        for l in open(f'/tmp/exam/read/{fn}.jsonl'):
            it=json.loads(l); k[it['item']]['hash']=hashlib.sha256(it['answer'].encode()).hexdigest()[:16]
    json.dump(k,open(kf,'w'))
